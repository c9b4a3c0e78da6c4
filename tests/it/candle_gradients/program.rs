pub(super) fn train() -> Result<(usize, usize)> {
    let vars = VarMap::new();
    let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
    let model = seq()
        .add(linear(4, 8, vb.pp("up"))?)
        .add(layer_norm(8, 1e-5, vb.pp("norm"))?)
        .add(linear(8, 1, vb.pp("down"))?);
    let mut optim = AdamW::new(vars.all_vars(), ParamsAdamW::default())?;
    let x = Tensor::randn(0f32, 1., (16, 4), &Device::Cpu)?;
    let mut trained = 0;
    for _ in 0..10 {
        let loss = loss::mse(&model.forward(&x)?, &x.sum_keepdim(1)?)?;
        let grads = loss.backward()?;
        trained = vars.all_vars().iter().filter(|var| grads.get(var).is_some()).count();
        optim.step(&grads)?;
    }
    Ok((trained, vars.all_vars().len()))
}
